"""Trust: keys, signatures and the policy over them."""
