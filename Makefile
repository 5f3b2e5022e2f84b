# make demo   sets up and runs the main job on the CPU (or on a GPU: make demo EXTRAS=cuda12,tiles-cuda12 CONSTRAINTS=)
# make test   sets up and runs the tests but for the long ones, in TEST_PROCESSES processes (2); each file in one of them, so that its disks are made once
# make test-long  the long tests, and those of hypothesis with many more examples
# make mutants  one-line faults that the tests have to notice, each in a copy of this tree (MUTANTS="records keys": only in these files)
# make soak   campaigns of faults against the cache, MINUTES (10) in all, and a tally (CAMPAIGNS="kills hostile": only these)
# make test-nvme  block map and backends on emulated NVMe drives, in QEMU (XNVME_LIBRARY_PATH: over this libxnvme too, in user space where it has upcie)
# make test-package  sdist and wheel, built, installed into an environment of their own, and tried there
# make notebooks  executes tutorials/ and saves the outputs in them (NOTEBOOKS="block_map tensor_io": only these)
# make docs   sets up what it needs, builds the site into build/site, and opens every page in headless Chromium where there is one
# make release  sdist and wheel in dist/, checked; nothing is uploaded
# make lint   ruff, mypy and codespell

PYTHON ?= python3
# One environment for each set of extras, since they need different builds of torch.
VENV ?= .venv$(if $(EXTRAS),-$(EXTRAS))
# constraints.txt pins the torch that the tests ran with. Empty leaves the choice to pip.
CONSTRAINTS ?= constraints.txt
EXTRAS ?=
DEMO ?=
PYTEST ?=
TEST_PROCESSES ?= 2
NOTEBOOKS ?=
MINUTES ?= 10
MUTANTS ?=
CAMPAIGNS ?=

# DeepNVMe's operators are compiled once, into the ignored folder of builds.
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/.build/torch_extensions

comma := ,
bin := $(VENV)/bin
pip_install := $(bin)/python -m pip install -q --disable-pip-version-check $(if $(CONSTRAINTS),-c $(CONSTRAINTS))

.PHONY: demo test test-long mutants soak test-nvme test-package notebooks docs release lint clean

demo: $(VENV)/.core
	$(bin)/monai-gds demo $(DEMO)

test: $(VENV)/.test
	$(bin)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile $(PYTEST)

test-long: $(VENV)/.test $(VENV)/.deepnvme
	$(bin)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile -m "long or hypothesis" --hypothesis-profile=long $(PYTEST)

mutants: $(VENV)/.test
	$(bin)/python -m tests.mutants --processes $(TEST_PROCESSES) $(MUTANTS)

soak: $(VENV)/.test
	$(bin)/python -W ignore -m tests.soak --minutes $(MINUTES) $(CAMPAIGNS)

test-nvme: $(VENV)/.test
	$(bin)/python tests/nvme/run.py $(PYTEST)

test-package: $(VENV)/.test
	CONSTRAINTS=$(abspath $(CONSTRAINTS)) $(bin)/python tests/package/run.py

notebooks: $(VENV)/.test
	$(bin)/python tools/notebooks.py $(NOTEBOOKS)

docs: $(VENV)/.docs
	$(bin)/python tools/docs.py --check

release: $(VENV)/.release
	rm -rf dist && $(bin)/python -m build && $(bin)/twine check --strict dist/*

lint: $(VENV)/.test
	$(bin)/ruff check . && $(bin)/ruff format --check . && $(bin)/mypy && $(bin)/codespell

$(VENV)/.core: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 …")'
	test -x $(bin)/python || $(PYTHON) -m venv $(VENV)
	$(pip_install) -e .$(if $(EXTRAS),[$(EXTRAS)])
	touch $@

$(VENV)/.test: $(VENV)/.core
	$(pip_install) -e .[dev$(if $(EXTRAS),$(comma)$(EXTRAS))]
	touch $@

$(VENV)/.docs: $(VENV)/.core
	$(pip_install) -e .[docs$(if $(EXTRAS),$(comma)$(EXTRAS))]
	touch $@

$(VENV)/.release: $(VENV)/.core
	$(pip_install) build twine
	touch $@

$(VENV)/.deepnvme: $(VENV)/.test monai_gds/storage/deepnvme/build.py monai_gds/storage/deepnvme/results.h
	$(bin)/python tools/prepare_deepnvme.py
	touch $@

clean:
	rm -rf $(VENV) .venv .venv-* .build build dist *.egg-info
