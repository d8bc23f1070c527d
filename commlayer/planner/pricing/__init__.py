"""What a path costs on each lane, as lines over a bucket's size. Knows no order and no choice."""
