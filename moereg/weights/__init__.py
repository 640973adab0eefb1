"""Weights of one layer: canonical, permuted for a kernel, and back."""

from __future__ import annotations

from moereg.weights.expert_weights import ExpertWeights
from moereg.weights.permuted import CanonicalReader, PerExpert, PermutedWeights

__all__ = ["CanonicalReader", "ExpertWeights", "PerExpert", "PermutedWeights"]
