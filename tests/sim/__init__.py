"""Simulations of commlayer's state machines: workers, a server and a coordinator in one process, without clocks or sockets."""
