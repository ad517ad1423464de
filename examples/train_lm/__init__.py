"""The main job on real input: a byte-level language model with NSA: trained on text, measured, drawn."""
