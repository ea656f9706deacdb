# Every command sets up everything it needs in .venv on a fresh clone.
PYTHON ?= python3
PORT ?= 8000
MODEL ?= demo
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Tests start hundreds of processes, each of which would compile the project anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup serve test test-long gates soak lint types clean

setup: $(READY)

# Without a GPU the exact torch: asked for by a range it would bring gigabytes of CUDA packages where they are of no use.
# With one, or where pip finds that torch with CUDA alone, which goes with another Triton, the torch that goes with ours.
# The other packages by uv, which takes a tenth of pip's time; by pip where uv reaches no index that has them.
# uv leaves modules uncompiled, and Ray ends a node whose agent takes more than half a minute to import what it needs: so
# that is compiled here.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	cp constraints.txt $(VENV)
	! nvidia-smi -L >/dev/null 2>&1 && $(INSTALL) torch numpy triton || { \
	  echo "taking the build of torch with CUDA: gigabytes are downloaded"; \
	  sed -i '/^torch=/d' $(VENV)/constraints.txt && $(INSTALL) torch numpy triton; }
	$(INSTALL) uv && $(BIN)/uv pip install --quiet --python $(BIN)/python -c $(VENV)/constraints.txt -e '.[dev]' \
	  || $(INSTALL) -e '.[dev]'
	$(BIN)/python -m compileall -q $(foreach name,ray grpc aiohttp opentelemetry,$(VENV)/lib/python3*/site-packages/$(name)) || true
	touch $(READY)

serve: $(READY)
	$(BIN)/latentserve serve --model $(MODEL) --port $(PORT)

# The test files with a mark: pytest would import all of them to find it.
marked = $(shell grep -rl --include='test_*.py' 'pytest.mark.$(1)\b' tests)

SIDE_BY_SIDE := -n 2 --dist loadfile --no-loadscope-reorder

# Hypothesis draws the same cases in every run of what a change must pass, so that a change is not refused for a draw that
# has nothing to do with it. `make soak` draws anew every time.
SAME_DRAWS := --hypothesis-profile=ci

# The files of the longer lane that take a minute or more, the longest first. They begin before the others: one that begins
# at the end leaves a core without work.
LONGEST := $(addprefix tests/, workers/test_sharded_engine.py kernels/test_interpreted.py e2e/test_following_the_load.py \
  workers/test_sharded_drafters.py workers/model_based/test_model_based_ranks.py e2e/test_two_nodes.py \
  workers/models/test_sparse_shards.py e2e/test_rolling_update.py workers/test_captures.py e2e/test_failing_start.py \
  kernels/mla_decode_triton/test_mla_decode_emulated.py \
  kernels/one_shot_triton/test_one_shot_ranks.py workers/processes/test_replica_processes.py \
  workers/models/test_decode_rows_emulated.py workers/model_based/test_model_based.py workers/parallel/test_rank_features.py \
  kernels/sparse_triton/test_sparse_emulated.py kernels/moe_triton/test_four_bit_grouped_emulated.py \
  deploy/cli/test_cli_processes.py workers/graphs/test_compiled_ahead.py)

# What shows in minutes that a change is sound. Tests that measure how fast something happens get the machine for themselves.
test: $(READY)
	$(BIN)/python -m pytest $(SAME_DRAWS) -m "not alone and not gate and not long and not soak" $(SIDE_BY_SIDE)
	$(BIN)/python -m pytest $(SAME_DRAWS) -m "alone and not long and not soak" $(call marked,alone)

# The tests that take long: clusters that come and go, kernels in the interpreter and the emulator.
test-long: $(READY)
	$(BIN)/python -m pytest $(SAME_DRAWS) -m "long and not alone and not soak" $(SIDE_BY_SIDE) $(LONGEST) $(filter-out $(LONGEST),$(call marked,long))
	$(BIN)/python -m pytest $(SAME_DRAWS) -m "long and alone and not soak" $(filter $(call marked,long),$(call marked,alone))

# Registers, spills, shared memory and instructions of every kernel at the sizes of published models: compilation alone.
# The plugin fails the run if a kernel was left out.
gates: $(READY)
	$(BIN)/python -m pytest -p tests.gated -m "gate and not soak" -n 2 $(call marked,gate)

# Cases whose settings occur in other cases, too, more seeds, the programs under bench: not part of what a change must pass.
soak: $(READY)
	$(BIN)/python -m pytest -m soak $(SIDE_BY_SIDE) $(sort $(call marked,soak) $(shell grep -o "^tests[^:]*/test_[^:]*" tests/soaked_cases.txt))
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(shell grep -rlE --include='test_*.py' '^ *@given' tests)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
