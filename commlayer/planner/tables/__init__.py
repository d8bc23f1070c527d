"""Machines and models that are known by name: data sheets, layers. Replaced by what is measured."""
