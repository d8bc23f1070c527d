"""Connections to other tools, one module for each. Import the module that you use: it loads the tool's package."""
