"""`commlayer demo`: one model, one slow link, trained dense and compressed, side by side. The package's own first user."""
