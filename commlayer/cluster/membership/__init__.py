"""The coordinator: membership, epochs, its journal, and its store."""
