"""The coordinator: who is a member, epochs, its journal, and its store."""
