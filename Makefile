# The only developer commands. `make demo` and `make test` make their own virtual environment first.
PYTHON ?= python3
VENV := .venv
MINUTES ?= 30
BIN := $(VENV)/bin
unexport PYTHONDONTWRITEBYTECODE  # or each of the tests' processes would compile every module anew

DEMO := examples/demo.yaml --cluster out/demo/machine.cluster.yaml --profile out/demo/machine.yaml

.PHONY: demo test pytest check docs site wheel bench gpu mutants calibrate clean

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "shardyard needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m compileall -qq -j 0 -x '/tests?/' $(VENV)/lib || true  # on all cores, and not what their tests are
	touch $@

demo: $(VENV)/ready  ## measure this machine, plan, run the plan for real, compare, report; some seven minutes
	@mkdir -p out/demo
	@printf '\n1 · what does this machine cost? (two processes over gloo)\n\n'
	$(BIN)/shardyard calibrate --quick --parts gemm,attention,memory,optimizer,launch,collective,overlap,variability,wrapping,layer --largest 16MiB \
	    --output out/demo/machine.yaml
	@printf '\n2 · what is the best way to train a small model on it?\n\n'
	$(BIN)/shardyard advise $(DEMO)
	@printf '\n3 · DDP, by PyTorch, beside its prediction\n\n'
	$(BIN)/shardyard execute $(DEMO) --seconds 3
	@printf '\n4 · and others: how far can these predictions be trusted?\n\n'
	$(BIN)/shardyard validate --quick --seconds 2 --cluster out/demo/machine.cluster.yaml --profile out/demo/machine.yaml \
	    --plot out/demo/validation.png --output out/demo/validation.json
	@printf '\n5 · the same simulator on 64 H100\n\n'
	$(BIN)/shardyard report examples/llama-3.1-70b.yaml --without published --output out/llama-3.1-70b
	@printf '\nopen out/llama-3.1-70b/report.html and out/demo/validation.png\n'

test: $(VENV)/ready  ## style and types (on one core), and tests beside them
	@$(MAKE) --no-print-directory --jobs 2 check pytest

pytest: $(VENV)/ready  ## tests alone
	$(BIN)/python -m pytest -n 3 --dist worksteal

check: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/ready  ## pages and pictures of docs/ that the program writes, and the site
	$(BIN)/python -m reports.guide
	$(BIN)/shardyard simulate examples/llama-3.1-70b.yaml --report out/docs
	cp out/docs/gantt.png docs/gantt.png
	$(BIN)/shardyard collective all_reduce --cluster dgx-a100 --nodes 128 --algorithm "ring, tree" --sizes 1KiB:1GiB:1048576 \
	    --by-ranks docs/all_reduce_by_ranks.png
	$(BIN)/shardyard collective broadcast --cluster dgx-a100 --nodes 8 --algorithm "flat, binomial, chain" --sizes 1MiB:1MiB \
	    --by-ranks docs/broadcast_by_ranks.png
	$(BIN)/shardyard teach gpipe 1f1b interleaved zb-h1 zb-v --plot docs/schedules.png
	$(BIN)/shardyard validate --published --plot docs/published.png
	$(BIN)/shardyard run examples/run-llama-3.1-405b.yaml --tokens 1e12 --plot docs/runs.png
	$(BIN)/python tests/test_samples.py
	$(MAKE) site

site: $(VENV)/ready  ## the documentation site, offline: out/site/index.html
	@$(BIN)/python -c 'import material' 2> /dev/null || \
	    $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo 'open out/site/index.html'

wheel: $(VENV)/ready  ## the wheel, tried in a fresh environment without PyTorch; what its dependencies weigh
	rm -rf build out/wheel
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --wheel-dir out/wheel .
	$(PYTHON) -m venv out/wheel/venv
	out/wheel/venv/bin/python -m pip install --quiet --disable-pip-version-check --no-index --find-links out/wheel shardyard
	cd out/wheel && venv/bin/shardyard simulate --model llama-3.1-8b --cluster dgx-h100
	cd out/wheel && venv/bin/shardyard plan --model llama-3.1-8b --cluster dgx-h100 --seconds 60
	cd out/wheel && venv/bin/shardyard report --model llama-3.1-8b --cluster dgx-h100 --without published --output page
	@du -cbh out/wheel/*.whl | sort -h | tail -8

bench: $(VENV)/ready  ## speed; takes a minute
	$(BIN)/python -m pytest tests/benchmarks -m benchmark -s

gpu: $(VENV)/ready  ## on a machine with NVIDIA GPUs: calibrate, execute everything, compare; 30 minutes; interrupted, it goes on
	$(BIN)/python -m calibration.gpu_day --output out/gpu --minutes $(MINUTES) $(if $(CLUSTER),--cluster $(CLUSTER))

mutants: $(VENV)/ready  ## small wrong changes of sim/ and strategies/: which does no test notice? an hour
	$(BIN)/python tests/mutants.py

calibrate: $(VENV)/ready  ## measure this machine anew and replace the shipped profile cpu-gloo; a quarter of an hour, nothing else running
	$(BIN)/shardyard calibrate --cluster cpu-gloo --samples out/cpu-gloo.samples.jsonl --output out/cpu-gloo.yaml
	cp out/cpu-gloo.yaml sim/pricing/profiles/cpu-gloo.yaml
	cp out/cpu-gloo.png docs/calibration.png
	mv out/cpu-gloo.samples.jsonl out/cpu-gloo.measured.jsonl

clean:
	rm -rf $(VENV) out build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
