# make install accepts PYTHON=python3.12 and the like; see tools/install.sh.
PY := .venv/bin/python
PACKAGES := backbones heads tasks datamodules tools
# One process per core, each with one thread, since small networks gain little from more threads.
# Bytecode is kept, or each test that starts a command would compile lightning, hydra and mmengine.
# The default tests build thousands of small networks: large pages and 1 GiB of kept memory save a
# seventh of their time. The slow ones build large networks, of which they would keep gigabytes.
MEMORY := THP_MEM_ALLOC_ENABLE=1 MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=1073741824
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PY) -m pytest --numprocesses=auto --dist=loadfile --durations=10

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all lint docs measurements gpu gpu-full verify doctor clean

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/make \1|\2/p' Makefile | while IFS='|' read -r name text; do printf '%-14s %s\n' "$$name" "$$text"; done

install:  ## create .venv with the tested packages (2 minutes and 3.3 GB the first time)
	@bash tools/install.sh

demo: install  ## train a small detector on sample data (5 to 8 minutes on 2 idle cores)
	$(PY) tools/run.py task=detection backbone=swin_t_afbo
	@echo "Look at the pictures in outputs/detection/swin_t_afbo/latest/preview and at curves.png beside it"

test: install lint  ## run make lint and the default tests
	$(MEMORY) $(PYTEST)

test-all: install lint  ## run make lint and all tests, including slow ones
	$(PYTEST) -m ""

lint: install  ## check style, formatting and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy --num-workers=2 $(PACKAGES)

docs: install  ## build the documentation into docs/_build/html
	$(PY) docs/_ext/paper_pages.py
	$(PY) -m sphinx -q -W --keep-going -b html docs docs/_build/html
	@echo "Open docs/_build/html/index.html"

measurements: install  ## time the mixers on this machine and add its page to the documentation
	$(PY) docs/_ext/measure.py $(OPTIONS)

# Both take any Python that has the packages: make gpu PY=python3.
gpu gpu-full: PY := $(or $(wildcard .venv/bin/python),python3)
gpu:  ## check numbers, kernels, tasks and speed of this GPU (15 minutes) and add its page
	$(PY) docs/_ext/measure.py gpu $(OPTIONS)

gpu-full:  ## the same with longer runs, and everything compiled
	$(PY) docs/_ext/measure.py gpu extent=full $(OPTIONS)

verify:  ## measure published weights on ImageNet: make verify data=/imagenet [weights=FOLDER]
	$(PY) tools/verify.py $(if $(data),data=$(data)) $(if $(weights),weights=$(weights)) $(OPTIONS)

doctor:  ## list what is installed, what is missing and what to type
	@if [ -x $(PY) ]; then $(PY) tools/doctor.py; else python3 tools/doctor.py; fi

clean:  ## remove caches; keeps .venv and outputs
	rm -rf .mypy_cache .pytest_cache .ruff_cache *.egg-info build docs/_build docs/reference
	find $(PACKAGES) tests -name __pycache__ -type d -prune -exec rm -rf {} +
