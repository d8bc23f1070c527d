"""`commlayer demo`: trains one model over one slow link, dense and compressed, and compares them."""
