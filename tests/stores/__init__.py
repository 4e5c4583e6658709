"""Stores: small ones that released versions have written, which all later versions read."""
