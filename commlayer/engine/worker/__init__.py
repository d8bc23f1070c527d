"""One rank's part in a step: gradients are collected, exchanged on paths, and handed out as averages."""
