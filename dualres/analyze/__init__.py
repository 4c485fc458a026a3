"""What happens inside a trained model: the paper's stream analyses and the figures that show them.

analysis    runs every analysis on a decoder; an `Analysis` is written to and read from a folder
taps        observe a model's streams without changing its outputs, or replace them after any write
cka         linear CKA between streams and layers
rescue      KL rescue: what each stream alone contributes to the prediction
gates       write gates, and how they correlate with rescue
retrieval   depth weights and their divergence between streams
norms       RMS of the streams and of block states
experts     expert load and router balance
health      a few cheap metrics, logged during training
figures     all of them as SVG and PNG, one panel per model (drawn by `panels`)
"""
