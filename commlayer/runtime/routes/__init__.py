"""The ways of a bucket from its gradients to their sum and back, behind one contract: see route.py."""
