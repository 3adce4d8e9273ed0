"""The forward of a unit as its plan says, and the tensors that autograd saves meanwhile.

Knows wrapped models and their units. Must not know when units are entered, nor who plans. In
reading order: arguments, slicing, inputs, reach, attributes, trial, forwards (recomputed, or on
slices of the batch); swapped, swapping (saved tensors that leave the device).
"""
