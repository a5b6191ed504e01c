# Thin front of CMake and the scripts; `make help` lists the targets.
# JOBS limits parallel jobs of builds and tests; PREFIX and DESTDIR say where `make install` goes.
JOBS         ?= $(shell nproc 2>/dev/null || echo 2)
PREFIX       ?= /usr/local
MODEL        ?= models/tinymoe-math
FUZZ_SECONDS ?= 60

#: make            build the release preset in build/release and leave the program at build/epx
all: build-release

# Configure once per preset; ninja runs cmake again by itself when a CMakeLists.txt changes. Tests are left out of the build
# while what they need is not installed, so that `make` and `make run` work without it.
build/%/build.ninja: CMakePresets.json
	cmake --preset $* --log-level=WARNING -DEPX_BUILD_TESTS=$$(scripts/install-deps test --check 2>/dev/null && echo ON || echo OFF)
	@touch $@

build-%: build/%/build.ninja
	cmake --build build/$* -j $(JOBS) $(if $(TARGET),--target $(TARGET))
	@if [ $* = release ]; then ln -sfn release/app/epx build/epx; fi

# The same with the tests, after `deps-test`.
with-tests-%: build/%/build.ninja
	@if grep -q 'EPX_BUILD_TESTS:BOOL=OFF' build/$*/CMakeCache.txt; then cmake --preset $* --log-level=WARNING -DEPX_BUILD_TESTS=ON; fi
	@$(MAKE) --no-print-directory build-$*

deps-%:
	@scripts/install-deps $*

#: make run        install what is missing, build, start two ranks, answer a word problem, then serve on port 30000
run: deps-run
	@$(MAKE) --no-print-directory build-release TARGET=epx
	build/epx demo --model-path $(MODEL)

#: make test       install what is missing, build, run all tests (at most 10 minutes on 2 cores)
test: deps-test
	@$(MAKE) --no-print-directory with-tests-release
	JOBS=$(JOBS) scripts/ci-ctest release -LE soak

#: make asan       tests under AddressSanitizer and UndefinedBehaviorSanitizer
asan: deps-test
	@$(MAKE) --no-print-directory with-tests-asan
	JOBS=$(JOBS) scripts/ci-ctest asan -LE 'soak|release_only'

#: make tsan       tests labelled tsan (ranks as threads) under ThreadSanitizer
tsan: deps-test
	@$(MAKE) --no-print-directory with-tests-tsan
	JOBS=$(JOBS) scripts/ci-ctest tsan -L tsan

#: make mutants    check that every planted mistake of the protocol makes a test fail
mutants: deps-test
	@$(MAKE) --no-print-directory with-tests-mutants
	JOBS=$(JOBS) scripts/ci-ctest mutants -L mutants

#: make fuzz       run each libFuzzer harness for FUZZ_SECONDS (60)
fuzz: deps-ci
	@$(MAKE) --no-print-directory with-tests-fuzz
	scripts/ci-fuzz build/fuzz $(FUZZ_SECONDS)

#: make soak       the long runs; SOAK_MINUTES (30) bounds the rounds of tests, EPX_SOAK_SECONDS (the same) the serving under load
soak: deps-test
	@$(MAKE) --no-print-directory with-tests-release
	scripts/soak

#: make accuracy   word problems in every layout, backend and form against one rank; DATA=FILE: those of a file of GSM8K's form instead
QUESTIONS ?= 200
accuracy: deps-test
	@$(MAKE) --no-print-directory with-tests-release TARGET=model_accuracy
	build/release/tests/model/model_accuracy $(if $(DATA),$(DATA) $(QUESTIONS),full)

#: make format     rewrite the C files with clang-format
format: deps-ci
	scripts/format

#: make lint       formatting, sizes of functions and files, layers, forbidden words
lint: deps-ci
	scripts/lint

#: make install    install library, headers and program under PREFIX (/usr/local), below DESTDIR if set
install:
	@$(MAKE) --no-print-directory build-release
	DESTDIR=$(DESTDIR) cmake --install build/release --prefix $(PREFIX)

#: make clean      remove build/
clean:
	rm -rf build

help:
	@sed -n 's/^#: //p' Makefile

.PHONY: all run test asan tsan mutants fuzz soak accuracy format lint install clean help
.PRECIOUS: build/%/build.ninja
