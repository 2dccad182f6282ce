# Needs nothing but Python 3.11 and pip. Everything is installed into .venv, once; later runs do not touch the network.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# mypy sees every module under the name it is installed with: passes/ and kernels/ belong inside dualkv_compile.
TYPES := build/types/dualkv_compile

.PHONY: demo test lint types operators clean

# The command rather than `python -m`, which would put this folder on the path, where transformers takes kernels/ for
# the package of that name.
demo: $(INSTALLED)
	$(BIN)/dualkv-compile demo $(ARGS)

# One process per core and one thread each: most of the time goes into tracing and compiling.
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests -n auto --maxprocesses 8 $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	rm -rf $(TYPES)
	mkdir -p $(TYPES)
	ln -s $(CURDIR)/dualkv_compile/* $(CURDIR)/passes $(CURDIR)/kernels $(TYPES)/
	ln -sf $(CURDIR)/dualkv_autoload.py build/types/
	cd build/types && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache -p dualkv_compile -m dualkv_autoload

# A test compares the document with the rules.
operators: $(INSTALLED)
	$(BIN)/dualkv-compile operators > docs/operators.new
	mv docs/operators.new docs/operators.md

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# The stamp is made last, so that an interrupted installation is taken up again.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[test,plot,dev]'
	touch $@
