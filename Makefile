# Each target sets up what it needs: an environment of its own, pinned by constraints.txt. A second run starts at once.
#   make demo ARGS="--seed 1"      make test ARGS="tests/linalg -x"        make bench ARGS="-k mlp"

PYTHON ?= python3
ARGS ?=

BIN := .venv/bin
PEERS := .venv-peers/bin
# The oldest torch of pyproject.toml.
OLDEST := 2.7.1
VERSION := $(shell sed -n 's/^version = "\(.*\)"$$/\1/p' pyproject.toml)
INSTALL := -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
# The build back end is installed beforehand, so that it too is the pinned one.
EDITABLE := $(INSTALL) --no-build-isolation --editable

# Whatever the environment says: the two test processes, and those that tests start, compile each module once.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test bench docs figures notebooks lint clean oldest release-check gpu-rehearsal wild jobs
.DELETE_ON_ERROR:

help:
	@echo "make demo | test | bench | docs | figures | notebooks | lint | clean"

demo: .venv/.installed
	$(BIN)/python -m curvops demo $(ARGS)

test: lint
	$(BIN)/python -m pytest $(ARGS)

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict curvops
	$(BIN)/lint-imports --no-logo

# The shape checks of the test run would be timed too: --override-ini leaves them out.
bench: .venv-peers/.installed
	$(PEERS)/python -m pytest benchmarks --override-ini addopts= --import-mode=importlib --disable-warnings \
	    --benchmark-only --benchmark-sort=name --benchmark-columns=median,iqr,min,rounds $(ARGS)

# The site of this version, in a folder of its own, to which site/latest leads; from pages and committed figures. The menu
# of versions in its head reads versions.json.
docs: .venv/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir site/$(VERSION)
	rm site/$(VERSION)/404.html  # it would look for its styles at the root of the host
	ln -sfn $(VERSION) site/latest
	ls site | grep '^[0-9]' | sort -rV | $(BIN)/python -c 'import json, sys; print(json.dumps( \
	    [{"version": v, "title": v, "aliases": ["latest"] * (v == "$(VERSION)")} for v in sys.stdin.read().split()]))' \
	    > site/versions.json
	echo '<meta http-equiv="refresh" content="0; url=latest/">' > site/index.html

# A page's own code draws its figures, into the folder where it runs: a temporary one in tests, docs/figures here.
figures: .venv/.installed
	cd docs/figures && OMP_NUM_THREADS=1 ../../$(BIN)/python -m doctest -o ELLIPSIS -o NORMALIZE_WHITESPACE \
	    $$(grep --files-with-matches plots.save ../*.md)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.front_picture docs/figures/front.png
	$(BIN)/python -c 'import pathlib, benchmarks.figures as f; [f.shrink_large(p := pathlib.Path("docs/figures")), f.thumbnails(p)]'

# The oldest torch, with versions of the rest that fit it.
oldest: .venv-oldest/.installed

.venv-oldest/.installed: constraints.txt pyproject.toml
	$(PYTHON) -m venv .venv-oldest
	sed 's/^torch==.*/torch==$(OLDEST)/' constraints.txt > .venv-oldest/constraints.txt
	.venv-oldest/bin/python $(subst constraints.txt,.venv-oldest/constraints.txt,$(INSTALL)) torch hatchling
	.venv-oldest/bin/python $(subst constraints.txt,.venv-oldest/constraints.txt,$(EDITABLE)) '.[demo,test,docs]'
	.venv-oldest/bin/python $(INSTALL) --no-deps curvlinops-for-pytorch backpack-for-pytorch einconv einops opt_einsum
	@touch $@

# The GPU run at toy size, on a CPU and then on the stand-in for CUDA, with the versions of the machine that it is for.
gpu-rehearsal: .venv-gpu/.installed
	rm -rf .rehearsal
	for device in cpu stand-in; do \
	    PYTHONPATH=.venv-gpu/site:. OMP_NUM_THREADS=2 .venv-gpu/bin/python -W ignore -m benchmarks.gpu --rehearse \
	        --device $$device --output .rehearsal/$$device || exit 1; \
	done

# Two steps as there: what is installed, then wheels without their needs, in a folder of their own.
.venv-gpu/.installed: benchmarks/gpu-machine.txt benchmarks/gpu-requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12) and "make gpu-rehearsal PYTHON=python3.12")'
	$(PYTHON) -m venv .venv-gpu
	.venv-gpu/bin/python -m pip --disable-pip-version-check install --quiet --requirement benchmarks/gpu-machine.txt
	rm -rf .venv-gpu/wheels .venv-gpu/site
	.venv-gpu/bin/python -m pip download --quiet --no-deps --only-binary=:all: --dest .venv-gpu/wheels \
	    --requirement benchmarks/gpu-requirements.txt
	.venv-gpu/bin/python -m pip install --quiet --no-index --no-deps --target .venv-gpu/site .venv-gpu/wheels/*.whl
	@touch $@

# Other people's architectures, row by row, into docs/wild.md: before a release.
wild: .venv-wild/.installed
	.venv-wild/bin/python -m benchmarks.wild $(ARGS)

# Two jobs with pretrained models of other packages, docs/crystal_potential.md and docs/pronunciation.md, and their notebooks.
jobs: .venv-wild/.installed
	OMP_NUM_THREADS=1 .venv-wild/bin/python -m benchmarks.crystal_potential
	OMP_NUM_THREADS=1 .venv-wild/bin/python -m benchmarks.pronunciation
	OMP_NUM_THREADS=1 .venv-wild/bin/python -m benchmarks.notebooks --only crystal_potential pronunciation

.venv-wild/.installed: benchmarks/wild-requirements.txt pyproject.toml
	$(PYTHON) -m venv .venv-wild
	.venv-wild/bin/python -m pip --disable-pip-version-check install --quiet --requirement benchmarks/wild-requirements.txt
	.venv-wild/bin/python -m pip --disable-pip-version-check install --quiet --editable .
	@touch $@

# A wheel and an sdist, in dist/: the wheel installed into an empty environment with the oldest and with the newest torch,
# then the sdist in its place.
release-check: .venv/.installed
	rm -rf dist && $(BIN)/hatchling build
	for torch in $(OLDEST) $$(sed -n "s/^torch==//p" constraints.txt); do \
	    $(PYTHON) -m venv --clear .venv-release && \
	    sed "s/^torch==.*/torch==$$torch/" constraints.txt > .venv-release/constraints.txt || exit 1; \
	    for file in dist/*.whl "--force-reinstall --no-deps $$(ls dist/*.tar.gz)"; do \
	        .venv-release/bin/python $(subst constraints.txt,.venv-release/constraints.txt,$(INSTALL)) $$file && \
	        .venv-release/bin/python tests/installed.py && \
	        .venv-release/bin/curvops --version || exit 1; \
	    done; \
	done
	rm -rf .venv-release

# Notebooks of the pages that docs/notebooks.md lists; those whose code has changed, or by ARGS=--all each, are executed.
notebooks: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.notebooks $(ARGS)

clean:
	rm -rf .venv .venv-peers .venv-oldest .venv-release .venv-gpu .venv-wild .rehearsal .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .benchmarks site dist curvops-demo
	find curvops tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first: what comes after must build on that very version.
.venv/.torch: constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python $(INSTALL) torch hatchling
	@touch $@

# A test compares with curvlinops. --no-deps: its backpack would pull torchvision, which does not fit a CPU-only torch.
.venv/.installed: .venv/.torch pyproject.toml
	$(BIN)/python $(EDITABLE) '.[demo,test,docs]'
	$(BIN)/python $(INSTALL) --no-deps curvlinops-for-pytorch backpack-for-pytorch einconv einops opt_einsum
	@touch $@

# laplace-torch and backpack pull torchvision, whose build does not fit a CPU-only torch and breaks their import: it is
# removed again. laplace-torch, --no-deps, gets its few real needs by name.
.venv-peers/.installed: constraints.txt pyproject.toml
	$(PYTHON) -m venv .venv-peers
	$(PEERS)/python $(INSTALL) torch hatchling
	$(PEERS)/python $(INSTALL) curvlinops-for-pytorch posteriors
	$(PEERS)/python $(INSTALL) --no-deps laplace-torch asdfghjkl torchmetrics lightning-utilities
	$(PEERS)/python $(EDITABLE) '.[bench]'
	$(PEERS)/python -m pip uninstall --quiet --yes torchvision
	@touch $@
