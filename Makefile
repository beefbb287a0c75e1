# Everything sets itself up in .venv and can be run again at no cost. PYTHON names the interpreter (3.11 or newer).
PYTHON ?= python3
BIN := .venv/bin
DEMO := runs/demo

.PHONY: install demo test test-slow lint

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# Pre-train on Fashion-MNIST with two workers, then compare the backbone with raw pixels and the untrained encoder.
demo: install
	$(BIN)/moco-ray demo-data data/fashion-mnist
	@if [ -e $(DEMO)/curves.png ]; then echo "$(DEMO) holds a finished run; its result:"; \
	elif [ -e $(DEMO)/run.json ]; then $(BIN)/moco-ray resume $(DEMO); \
	else $(BIN)/moco-ray pretrain jobs/demo.toml --workers 2 --storage runs --name demo; fi
	$(BIN)/moco-ray evaluate $(DEMO) --queries data/fashion-mnist/test --no-linear
	@echo "curves:     $(DEMO)/curves.png"
	@echo "watch it:   $(BIN)/tensorboard --logdir $(DEMO)/tensorboard"

test: install
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -q -m 'not slow' --durations=15

test-slow: install
	$(BIN)/python -m pytest -q -m slow --durations=0

lint: install
	$(BIN)/ruff check .
