# make bench   install into .venv, then run the main job
# make test    install, then run every test this machine can
# make check   install, then run the formatter, the linter and the type checker

VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin

# The newest Triton that the kernels are compiled with: declared once, in pyproject.toml. It lives beside the
# installed one; tests put its folder first on the PYTHONPATH of a subprocess.
NEWEST_TRITON := $(shell sed -n 's/^newest-triton = "\(.*\)"/\1/p' pyproject.toml)
TRITON_NEWEST := $(VENV)/triton-newest

# Test processes, each with one thread: at most four, since they share the memory too.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); [ $$n -gt 4 ] && n=4; echo $$n)

# A Python that already has a torch built for a GPU keeps it.
HAS_GPU_TORCH = $(PYTHON) -c 'import sys, torch; sys.exit(not (torch.version.cuda or torch.version.hip))' 2>/dev/null
PIP = $(BIN)/python -m pip --disable-pip-version-check -qq
FAILED = { echo "gdpa: the installation failed: $(1)" >&2; exit 1; }

.PHONY: bench test check install clean

bench: install
	@$(BIN)/python -m gdpa bench --memory

test: install $(TRITON_NEWEST)/.installed-$(NEWEST_TRITON)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

check: install
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	@if $(HAS_GPU_TORCH); then \
	    echo "gdpa: creating $(VENV) around the torch that $(PYTHON) has"; \
	    $(PYTHON) -m venv --system-site-packages $(VENV) || $(call FAILED,$(PYTHON) -m venv); \
	    extra=test; \
	else \
	    echo "gdpa: creating $(VENV)"; \
	    $(PYTHON) -m venv $(VENV) || $(call FAILED,$(PYTHON) -m venv); \
	    extra=dev; \
	fi; \
	echo "gdpa: installing the build tool"; \
	$(PIP) install 'setuptools>=77' || $(call FAILED,setuptools); \
	echo "gdpa: installing gdpa[$$extra] and what it needs (torch is the large part)"; \
	$(PIP) install --no-build-isolation -e ".[$$extra]" || $(call FAILED,gdpa[$$extra]); \
	touch $@; \
	echo "gdpa: installed"

$(TRITON_NEWEST)/.installed-%: $(VENV)/.installed
	@echo "gdpa: installing Triton $* beside the other one, to compile the kernels with"
	@rm -rf $(TRITON_NEWEST)
	@$(PIP) install --no-deps --target $(TRITON_NEWEST) triton==$* || $(call FAILED,triton==$*)
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
