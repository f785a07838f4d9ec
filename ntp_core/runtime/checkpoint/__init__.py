"""Checkpoints that know no layout: saved at any degrees and shares, loaded at any other."""
