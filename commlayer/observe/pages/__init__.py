"""The web pages of a job: the page, its updates, metrics, and the server that sends them."""
