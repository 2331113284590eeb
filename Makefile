# Needs Python 3.11 and make. `make PYTHON=python3.11 …` picks another interpreter than python3.

PYTHON ?= python3
SEED ?= 0
KILLS ?= 20
MINUTES ?= 30
# How many tests run at once. Some tests wait, so four keep two cores busy.
WORKERS ?= 4
# The long tests, in pieces that each end within 30 minutes on two cores; each is a target of its own: test-process, …
PIECES := process engine crash soak numerics properties clients agents presets page mutants
GPU := $(shell command -v nvidia-smi 2>/dev/null)
# Which build of torch: "cuda" with a GPU, else "cpu", which is a tenth of the size.
TORCH ?= $(if $(GPU),cuda,cpu)
# The index with the CPU build of torch. If it is empty, pip uses only the indexes that it is configured for.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

# Tests start many processes. Without this, each would compile its modules where the environment forbids caches.
export PYTHONDONTWRITEBYTECODE :=

BIN := .venv/bin
PYTEST := $(BIN)/pytest -n $(WORKERS) --no-loadscope-reorder -rs
LOCKS := deploy/requirements
# pip installs exactly the files in a lock: it checks their hashes, and adds no dependencies.
PIP := -m pip --disable-pip-version-check install -q --no-deps
LOCKED := $(PIP) --no-build-isolation --require-hashes
FROM_INDEX := $(if $(filter cpu,$(TORCH)),$(addprefix --extra-index-url ,$(TORCH_INDEX)))
CLIENTS := $(patsubst tests/clients/%/requirements.txt,%,$(wildcard tests/clients/*/requirements.txt))
LIBRARIES := $(basename $(notdir $(wildcard environments/requirements/*.txt)))
FRAMEWORKS := ai_sdk claude_agent_sdk pydantic_ai
AGENTS := $(notdir $(patsubst %/,%,$(dir $(wildcard tests/agents/*/requirements.txt tests/agents/*/package-lock.json))))

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' Makefile

install: .venv/installed .venv-engine/installed  ## both environments: Weir's, and the engine's with SGLang

demo: install  ## the whole loop on this machine: a tiny model learns to use its tool (SEED=n)
	@$(BIN)/weir demo --seed $(SEED)

env-demo: install run/environments/reasoning_gym/installed  ## a tiny model learns a task of reasoning-gym, and is judged before and after
	@$(BIN)/weir env demo --seed $(SEED)

tinker-demo: install run/clients/cookbook_newest/installed  ## a loop of tinker-cookbook trains a tiny model on this machine
	@$(BIN)/python -m tests.support.clients.tinker_demo

test: expected-time check  ## the checks, then the tests of all layers but the long ones, the real engine included
	@$(PYTEST) -m "not long and not browser"

expected-time:
	@echo "make test: about twenty minutes on two cores, once everything is installed"

test-fast: .venv/installed  ## the short tests that need no engine
	@$(PYTEST) -m "not engine and not long and not browser"

test-long: $(PIECES:%=test-%)  ## all long tests, piece by piece (hours); each piece is a target: test-process, test-engine, …

test-process: install run/helm/env/installed  ## the long tests of the layers unit, service and process
	@$(PYTEST) -m "long and not engine and not browser" tests/unit tests/service tests/process

test-engine: install run/models/smollm2/config.json  ## the long tests with the real engine
	@$(BIN)/pytest -rs -m "long and not browser" tests/engine

test-crash: install  ## a kill in each window of the crash matrix
	@$(BIN)/pytest -rs -m long tests/crash

test-soak: install  ## two minutes under pressure
	@$(BIN)/pytest -rs -m long tests/soak

test-pauses: install  ## `make test`'s tests while all processes stand still for 6 s, again and again
	@$(BIN)/python -m tests.support.pauses $(PYTEST) -m "not long and not browser and not failover"

test-properties: .venv/installed  ## the property tests, with ten times as many examples from hypothesis
	@$(PYTEST) -m "hypothesis and not engine" --hypothesis-profile long --timeout 36000

# The instruction sets that torch and oneDNN are limited to. `make test` runs the same tests without a limit.
PROCESSORS := ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=SSE41 ONEDNN_MAX_CPU_ISA=AVX2

test-numerics: .venv/installed  ## the tests of arithmetic, limited to the instruction sets of older processors
	@for setting in $(PROCESSORS); do \
		echo "with $$setting"; env $$setting $(PYTEST) -m "numeric and not long" || exit 1; done

test-clients: install run/models/clients/config.json $(CLIENTS:%=run/clients/%/installed) \
	run/clients/openai_npm/installed $(LIBRARIES:%=run/environments/%/installed) \
	$(FRAMEWORKS:%=run/agents/%/installed)
test-clients:  ## SDKs against the real engine, and trainers that read exports
	@$(BIN)/pytest -rs tests/clients

test-agents: install $(AGENTS:%=run/agents/%/installed)  ## whole agents against a scripted engine
	@$(BIN)/pytest -rs tests/agents

test-presets: install  ## each preset of the trainer on the demo's task; a collapse, and one with guards, another seed for each commit
	@$(BIN)/pytest -rs tests/presets -k "not with_guards or seed$$(($$(git rev-list --count HEAD) / 11 % 5))"

SHARD ?= 0/1
mutants: install  ## small random faults in the product: which of them the quick tests find (an hour; SHARD=0/4 tries every fourth)
	@$(BIN)/python -m tests.mutants cover --workers $(WORKERS) --shard $(SHARD)
	@$(BIN)/python -m tests.mutants run --shard $(SHARD)
	@$(BIN)/python -m tests.mutants table

test-mutants:  ## a quarter of the mutants, another one for each commit
	@$(MAKE) mutants SHARD=$$(($$(git rev-list --count HEAD) % 4))/4

test-page: install site run/page/axe/installed  ## the operators' page in a real browser: Chromium, which apt or WEIR_TEST_CHROMIUM provides
	@command -v "$${WEIR_TEST_CHROMIUM:-chromium}" >/dev/null \
		|| { echo "no Chromium: apt-get install --no-install-recommends chromium, or name one in WEIR_TEST_CHROMIUM" >&2; exit 1; }
	@WEIR_TEST_BROWSER=required $(PYTEST) tests/page

page-shots: install  ## the screenshots in docs/page, of a run of the demo
	@$(BIN)/python -m tests.support.page.screenshots

page-vendor: .venv/installed  ## renew the page's libraries from the npm registry, in the versions of vendor.json
	@$(BIN)/python -m tests.support.page.vendored

house: .venv/installed  ## the figures of the house: files, lines, rooms, one importer, the paths of a turn and of a step
	@$(BIN)/python -m bench.house --paths

bench: install  ## the cost of gateway and queue: CPU per turn, its parts, and how a long prompt delays other streams
	@$(BIN)/python -m bench.gateway
	@$(BIN)/python -m bench.profile
	@$(BIN)/python -m bench.stall
	@$(BIN)/python -m bench.queue

bench-trainer: install run/bench/trl/installed  ## the cost of a training step, compared with plain torch and TRL (long)
	@$(BIN)/python -m bench.trainer

bench-learning: install  ## how a model learns at staleness 0, 2, 4, 8, with five seeds, and a harder game (hours)
	@$(BIN)/python -m bench.learning --task tool --target 0.95 --plot run/learning/learning.png
	@$(BIN)/python -m bench.learning --task guess --results run/guess --plot run/guess/guess.png

bench-asynchrony: install  ## asynchronous against synchronous training, where tools are slow at times (hours)
	@$(BIN)/python -m bench.asynchrony

results: install $(foreach each,reasoning_gym textarena,run/environments/$(each)/installed) run/bench/trl/installed
results:  ## the experiments of results/: makes the runs that lack figures, and the page (an hour or more)
	@$(BIN)/python -m results countdown chain_sum count_bits nim errands colours extraction --report

gpu-check: install  ## what to run first on a GPU: environment, kernels, trainings, a step, the loop with a push (docs/gpu.md; ARGS="--model DIR")
	@$(BIN)/python -m bench.gpu $(ARGS)

crash: install  ## kill parts of the whole system, one after the other, then audit it (KILLS=n SEED=n)
	@$(BIN)/python -m tests.crash --kills $(KILLS) --seed $(SEED)

soak: .venv/installed  ## agents of all dialects, hostile ones among them, while engines die and hang (MINUTES=n SEED=n)
	@$(BIN)/python -m tests.soak --minutes $(MINUTES) --seed $(SEED)

check: install site  ## format, lint, types, imports, layout, and the site with its links
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/pytest tests/house

redis-servers: run/servers/valkey-8/server  ## Debian's Redis 7 and Valkey 8 for tests, unpacked into run/servers

run/servers/valkey-8/server: $(LOCKS)/redis-servers
	@$(LOCKS)/redis-servers run/servers
	@touch $@

map:  ## the packages of the system and their files, each with the sentence that says what it is for
	@$(PYTHON) docs/map.py

site: .venv/installed run/site/env/installed  ## the documentation as a site with search, in run/site/built
	@$(BIN)/python docs/site/build.py

lock: .venv/installed  ## renew the locks of all environments (UPGRADE=--upgrade takes newer versions)
	@$(LOCKS)/lock $(UPGRADE)

chart: .venv/installed  ## the Helm chart in dist/, made of deploy/kubernetes by kubectl
	@$(BIN)/python deploy/chart.py

release: .venv/installed  ## the files of a release in dist/: wheel, sdist, Helm chart, bill of materials, licences, checksums
	@$(BIN)/python deploy/release.py $(RELEASE)

licences: install  ## the licence of every installed package, also in the engine's environment
	@for environment in .venv .venv-engine; do \
		echo "$$environment"; $(BIN)/pip-licenses --python=$$environment/bin/python --order=license; \
	done

up: install  ## start everything in the background; WEIR_MODEL_PATH names the model
	@$(BIN)/weir up

status: .venv/installed  ## which services run, and whether they are ready
	@$(BIN)/weir status

down: .venv/installed  ## stop what `up` started
	@$(BIN)/weir down

clean:  ## remove the environments, caches and runs; stop the services first
	rm -rf .venv .venv-engine run build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# Each of these targets is a file that make touches after an installation. So a second run installs nothing. If a
# pin has changed, make installs again.
.venv/installed: pyproject.toml $(LOCKS)/build.txt $(LOCKS)/services.txt $(LOCKS)/torch-$(TORCH).txt
	@$(call new_environment,.venv)
	@echo "installing Weir into .venv (minutes, once)"
	@$(BIN)/python $(LOCKED) -r $(LOCKS)/build.txt
	@$(BIN)/python $(LOCKED) -r $(LOCKS)/services.txt
	@$(BIN)/python $(LOCKED) $(FROM_INDEX) -r $(LOCKS)/torch-$(TORCH).txt
	@$(BIN)/python $(PIP) --no-build-isolation -e .
	@touch $@

.venv-engine/installed: $(LOCKS)/engine-$(TORCH).txt $(LOCKS)/torch-cpu.txt
	@$(call new_environment,.venv-engine)
	@echo "installing SGLang into .venv-engine (minutes, once)"
ifeq ($(TORCH),cpu)
	@.venv-engine/bin/python $(LOCKED) $(FROM_INDEX) -r $(LOCKS)/torch-cpu.txt
endif
	@.venv-engine/bin/python $(LOCKED) -r $(LOCKS)/engine-$(TORCH).txt
ifeq ($(TORCH),cpu)
	@echo "$(CURDIR)/rollout_server/engine/shim" > $$(echo .venv-engine/lib/python3*/site-packages)/engine_shim.pth
endif
	@touch $@

# MkDocs, and Helm's library for the tests of the chart.
run/site/env/installed run/helm/env/installed: run/%/env/installed: $(LOCKS)/%.txt
	@$(call new_environment,$(@D))
	@echo "installing $(<F) into $(@D)"
	@$(@D)/bin/python $(LOCKED) -r $<
	@touch $@

run/clients/%/installed: tests/clients/%/requirements.txt
	@$(call new_environment,run/clients/$*)
	@echo "installing the client $* into run/clients/$*"
	@run/clients/$*/bin/python $(LOCKED) -r $<
	@touch $@

# These clients need torch: the locks leave it out, because its build depends on the machine.
WITH_TORCH := trl verl cookbook_former cookbook_newest tinker_first tinker_middle tinker_newest
TRAINERS := $(WITH_TORCH:%=run/clients/%/installed)
$(TRAINERS): run/clients/%/installed: tests/clients/%/requirements.txt $(LOCKS)/build.txt $(LOCKS)/torch-$(TORCH).txt
	@$(call new_environment,run/clients/$*)
	@echo "installing the client $* into run/clients/$*"
	@run/clients/$*/bin/python $(LOCKED) -r $(LOCKS)/build.txt
	@run/clients/$*/bin/python $(LOCKED) $(FROM_INDEX) -r $(LOCKS)/torch-$(TORCH).txt
	@run/clients/$*/bin/python $(LOCKED) -r $<
	@touch $@

# A library of environments, in a Python environment of its own.
run/environments/%/installed: environments/requirements/%.txt $(LOCKS)/build.txt
	@$(call new_environment,run/environments/$*)
	@echo "installing the environments of $* into run/environments/$*"
	@run/environments/$*/bin/python $(LOCKED) -r $(LOCKS)/build.txt
	@run/environments/$*/bin/python $(LOCKED) -r $<
	@run/environments/$*/bin/python environments/programs/prepare.py $*
	@touch $@

run/clients/openai_npm/installed: $(wildcard tests/clients/openai_npm/package*.json)
	@echo "installing the client openai_npm into $(@D)"
	@$(npm_install)

run/page/axe/installed: $(wildcard tests/support/page/axe/package*.json)
	@echo "installing axe-core into $(@D)"
	@$(npm_install)

run/agents/%/installed: tests/agents/%/requirements.txt
	@$(call new_environment,run/agents/$*)
	@echo "installing the agent $* into run/agents/$*"
	@run/agents/$*/bin/python $(LOCKED) -r $<
	@touch $@

run/agents/%/installed: tests/agents/%/package-lock.json tests/agents/%/package.json
	@echo "installing the agent $* into run/agents/$*"
	@$(npm_install)

run/bench/trl/installed: bench/trl/requirements.txt $(LOCKS)/torch-$(TORCH).txt
	@$(call new_environment,$(@D))
	@echo "installing TRL into $(@D)"
	@$(@D)/bin/python $(LOCKED) $(FROM_INDEX) -r $(LOCKS)/torch-$(TORCH).txt
	@$(@D)/bin/python $(LOCKED) -r $<
	@touch $@

run/models/clients/config.json: tests/support/clients/school.py $(wildcard deploy/weir/demo/*.py) | .venv/installed
	@echo "training the demo's model for the clients (minutes, once)"
	@$(BIN)/python -m tests.support.clients.school --out $(@D)

run/models/smollm2/config.json: deploy/weir/demo/smollm2.py deploy/weir/demo/smollm2.txt | .venv/installed .venv-engine/installed
	@$(BIN)/python -m weir.demo.real_demo $(@D)

define npm_install
mkdir -p $(@D) && cp $^ $(@D) && cd $(@D) && npm ci --silent --no-audit --no-fund && touch $(notdir $@)
endef

define new_environment
$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null \
	|| { echo "Weir needs Python 3.11, and $(PYTHON) is $$($(PYTHON) -V 2>/dev/null || echo missing): make PYTHON=/path/to/python3.11" >&2; exit 1; }; \
$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	|| { echo "$(PYTHON) has no venv module: install it (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }; \
$(PYTHON) -m venv $(1)
endef

.PHONY: help install redis-servers map site lock chart release licences demo env-demo tinker-demo bench bench-trainer bench-learning bench-asynchrony results gpu-check expected-time test test-fast test-long test-pauses $(PIECES:%=test-%) page-shots page-vendor crash soak check up status down clean
