"""Quality guard: keeps codecs fine enough for the loss budget."""
