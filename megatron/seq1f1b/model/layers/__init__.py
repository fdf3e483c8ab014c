"""Layers other than attention that know segments: recurrent ones, experts, heads that predict several tokens."""
