"""Chaos: small runs killed and stores damaged, hundreds of times, at random."""
