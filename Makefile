# Everything runs in a virtual environment of its own; set PYTHON to choose the interpreter (3.11 to 3.14).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TOOLS := $(VENV)/.tools
DATA ?=
LABEL ?=
PROFILE ?= masks
ROUNDS ?= 10
CASES ?=
MEANWHILE := :
# A file of versions, such as .ci/demo.lock, to install those instead of the newest that are taken.
LOCK ?=
SEEDS ?= 0-99
HOURS ?= 2
SEED ?= 1
FROM ?= 0
KIND ?=
MINUTES ?= 5
TARGET ?=
QUICK ?=
ONLY ?=
JOBS ?= 2
SHELL := bash
.SHELLFLAGS := -o pipefail -c
TYPED := he_processors dp_components nvflare_plugins jobs poc_workspace
# Tests side by side; a process without any left takes some of the others, so that no core waits for the longest file.
PARALLEL ?= -n auto --maxprocesses 4 --dist worksteal

.PHONY: demo lint test test-all oracle canary simulate soak mutants fuzz matrix bench-load bench-horizontal bench-tables bench-he bench-vertical bench-cuda bench-cluster bench-federboost bench-papers bench-peers bench-dp bench-smoke bench-all docs clean

demo: $(STAMP)
	$(BIN)/veilboost demo --profile $(PROFILE) --rounds $(ROUNDS) $(if $(DATA),--data "$(DATA)") $(if $(LABEL),--label "$(LABEL)") $(if $(NAMES),--names "$(NAMES)")

# Types beside format, style and arrows between packages: about half a minute.
lint: $(TOOLS)
	@$(BIN)/mypy $(TYPED) & types=$$!; \
	$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/lint-imports --no-cache; rest=$$?; $(MEANWHILE); \
	wait $$types && exit $$rest

# While types are checked on one core, another compiles the tests, which each of the processes below would do for itself.
test: MEANWHILE = $(BIN)/python -m pytest --collect-only -qq $(CASES) >/dev/null
test: lint
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not poc and not gpu" $(CASES)

test-all: $(TOOLS)
	-$(BIN)/python .ci/install.py notebooks  # notebooks run where these install, else they are skipped
	HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest -m "not gpu" $(CASES)

# Our trees beside those of every XGBoost whose arithmetic we have, each in an environment of its own; 3.3 and later ask
# for Python 3.12. `make test` compares with trees that these programs wrote before.
ORACLES ?= 3.2.0 3.3.0 3.4.1
ORACLE_PYTHON ?= python3.12
# What grows in an environment of its own: its name, what is installed there, the file for the trees.
define grow_trees
{ [ -x $(VENV)/oracle/$(1)/bin/python ] || $(ORACLE_PYTHON) -m venv $(VENV)/oracle/$(1); } && \
$(VENV)/oracle/$(1)/bin/python -m pip install --quiet --disable-pip-version-check numpy scipy && \
$(VENV)/oracle/$(1)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --no-deps $(2) && \
$(VENV)/oracle/$(1)/bin/python tests/oracle/growth_trees.py $(3) && \
$(VENV)/oracle/$(1)/bin/python tests/oracle/ranking_trees.py $(subst growth,ranking,$(3))
endef

oracle: $(TOOLS)
	@for release in $(ORACLES); do echo "XGBoost $$release ..."; \
	    $(call grow_trees,$$release,xgboost==$$release,$(VENV)/oracle/growth_trees_$${release%.*}.json.gz) || exit 1; \
	done
	VEILBOOST_ORACLE=$(abspath $(VENV))/oracle $(BIN)/python -m pytest tests/oracle/test_growth_equals_central.py \
	    tests/oracle/test_ranking_equals_central.py
	$(BIN)/python -m tests.oracle.equality $(foreach one,$(ORACLES),$(VENV)/oracle/growth_trees_$(basename $(one)).json.gz) \
	    --write nvflare_plugins/growth/EQUALITY.md

# The newest XGBoost that pip finds, beside the newest arithmetic that we have: 0 where every field of every tree is equal.
canary: $(TOOLS)
	@$(call grow_trees,newest,xgboost,$(VENV)/oracle/growth_trees_newest.json.gz)
	@$(BIN)/python -m tests.oracle.equality $(VENV)/oracle/growth_trees_newest.json.gz

# Jobs on virtual time, and what a seed lets befall them: about five seeds a second and process.
simulate: $(TOOLS)
	$(BIN)/python -m tests.simulation.run --seeds $(SEEDS) --jobs $(JOBS) $(if $(KIND),--kind $(KIND))

# Jobs of all kinds in a row in one POC, each under what a seed lets befall it; as root also full disks.
soak: $(TOOLS)
	$(BIN)/python -m tests.poc.soak --hours $(HOURS) --seed $(SEED) --from $(FROM)

# Any bytes to every parser; atheris guides it by coverage where it installs, otherwise inputs are drawn without that.
fuzz: $(TOOLS)
	-$(BIN)/python -m pip install --quiet atheris
	$(BIN)/python -m tests.fuzz.run --minutes $(MINUTES) $(if $(TARGET),--target "$(TARGET)")

# Planted defects, and how many seeds each survives: a quarter of an hour.
mutants: $(TOOLS)
	$(BIN)/python -m tests.simulation.mutants --jobs $(JOBS)

# The documents as a site in build/docs; a warning, such as a link that leads nowhere, is an error.
docs: $(TOOLS)
	$(BIN)/python .ci/install.py docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --config-file docs/mkdocs.yml

# Under every Python, XGBoost and FLARE that this machine can install: about ten minutes each.
matrix:
	.ci/matrix

# Every benchmark in a quick shape: its figures mean nothing, but none of them is dead.
bench-smoke: $(TOOLS)
	$(BIN)/python -m tests.bench.smoke $(if $(ONLY),--only $(ONLY))

# Every benchmark in full, one after another: days. Figures are kept with machine, load, commit and date.
bench-all: $(TOOLS)
	$(BIN)/python .ci/install.py bench
	$(BIN)/python -m tests.bench.smoke --full $(if $(DATA),--data "$(DATA)") $(if $(ONLY),--only $(ONLY))

# Hundreds of sites in one process: some minutes.
bench-load: $(TOOLS)
	$(BIN)/python -m tests.bench.bench_load

bench-horizontal: $(TOOLS)
	$(BIN)/python -m tests.bench.bench_horizontal $(if $(QUICK),--quick) $(if $(ONLY),--only $(ONLY))

bench-tables: $(TOOLS)
	$(BIN)/python -m tests.bench.bench_tables

bench-he: $(TOOLS)
	$(BIN)/python .ci/install.py bench
	-$(BIN)/python -m pip install --quiet "sf-heu==0.5.2b0"  # a peer; reported as absent where it does not install
	$(BIN)/python -m tests.bench.bench_he

bench-vertical: BINS_32 = paillier_3072 elgamal elgamal_20 elgamal_guarded
bench-vertical: $(TOOLS)
	$(BIN)/python .ci/install.py bench
	$(BIN)/python -m tests.bench.bench_vertical
	$(BIN)/python -m tests.bench.bench_vertical --bins 32 --only $(BINS_32)

bench-cuda: $(TOOLS)
	$(BIN)/python .ci/install.py cuda
	$(BIN)/python -m tests.bench.bench_cuda

bench-cluster: $(TOOLS)
	$(BIN)/python .ci/install.py cluster
	$(BIN)/python -m tests.bench.bench_cluster

# Ours beside every table of the five papers; DATA is a folder with further sets, such as cs-training.csv.
bench-papers: $(TOOLS)
	$(BIN)/python -m tests.bench.bench_papers $(if $(DATA),--data "$(DATA)")

# FATE_PYTHON=python of an environment with pyfate 2.2 and pandas 2 runs FATE beside ours.
bench-peers: $(TOOLS)
	$(BIN)/python -m tests.bench.bench_peers

bench-federboost: $(TOOLS)
	$(BIN)/python -m tests.bench.bench_federboost_sweeps

bench-dp: $(TOOLS)
	$(BIN)/python -m tests.bench.bench_dp $(if $(DATA),--sets $(DATA)) $(if $(LABEL),--label "$(LABEL)")
	$(BIN)/python -m tests.bench.bench_dp_rivals $(if $(DATA),--sets $(DATA)) $(if $(LABEL),--label "$(LABEL)") $(if $(FOREST_PYTHON),--forest-python "$(FOREST_PYTHON)")

# What runs the package: half a minute where the network is quick.
$(STAMP): pyproject.toml .ci/install.py $(wildcard he_processors/_native/*.[ch] nvflare_plugins/growth/_native/*.[ch])
	@echo "Setting up $(VENV): about a minute and 900 MB the first time."
	@$(PYTHON) -c "import sys; sys.exit(None if (3, 11) <= sys.version_info < (3, 15) else 'VeilBoost needs Python 3.11 to 3.14; set PYTHON=')"
	$(PYTHON) -m venv $(VENV)
	LOCK=$(LOCK) $(BIN)/python .ci/install.py
	@touch $@

# What tests, lint and benchmarks need beside it. The oracle has wheels for Linux with glibc 2.35 only: its test is
# skipped where it does not install.
$(TOOLS): $(STAMP)
	@echo "Setting up what tests need: about 400 MB the first time."
	LOCK=$(LOCK) $(BIN)/python .ci/install.py test oracle || LOCK=$(LOCK) $(BIN)/python .ci/install.py test
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info
