"""What stands in the way of a run on this machine: facts are gathered, then judged. Changes nothing, and takes no seat."""
