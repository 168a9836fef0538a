"""How fast acceptance is simulated: tokens of a store per second, reading and packing included.

    python benchmarks/simulate.py --out benchmarks/results/simulate.json

Writes a store of random states of SmolLM2's sizes (D 576, V 49,152) and simulates a drafter of those sizes over it, chain by chain and as
a tree. Random drafters are never right, so rows leave after their first draft: that flatters chains. `--accepted 0.6`
makes a drafter whose drafts are right that often: its head reads the token that comes next from a table.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3.draft.model import DrafterConfig, Eagle3Drafter
from eagle3.draft.target_weights import TargetWeights
from eagle3.evaluation.simulate import parse_speculation, simulate_all
from eagle3.features.manifest import Manifest
from eagle3.features.record import FeatureSample, supervised_rows
from eagle3.features.store import FeatureStore, FeatureWriter
from eagle3.tracking import git_state, hardware, versions
