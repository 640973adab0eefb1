"""Warp-specialized products for sm90, in Gluon."""
