# Thin front of CMake and the scripts; `make help` lists the targets.
# JOBS limits parallel jobs of builds and tests; PREFIX and DESTDIR say where `make install` goes.
JOBS         ?= $(shell nproc 2>/dev/null || echo 2)
PREFIX       ?= /usr/local
MODEL        ?= models/tinymoe-math
FUZZ_SECONDS ?= 60

#: make            build the release preset in build/release and leave the program at build/epx
all: build-release

# Configure once per preset; ninja runs cmake again by itself when a CMakeLists.txt changes.
build/%/build.ninja: CMakePresets.json
	cmake --preset $* --log-level=WARNING
	@touch $@

build-%: build/%/build.ninja
	cmake --build build/$* -j $(JOBS)
	@if [ $* = release ]; then ln -sfn release/app/epx build/epx; fi

deps-%:
	@scripts/install-deps $*

#: make run        install what is missing, build, start two ranks, answer a word problem, then serve on port 30000
run: deps-run
	@$(MAKE) --no-print-directory build-release
	build/epx demo --model-path $(MODEL)

#: make test       install what is missing, build, run all tests (at most 10 minutes on 2 cores)
test: deps-test
	@$(MAKE) --no-print-directory build-release
	JOBS=$(JOBS) scripts/ci-ctest release -LE soak

#: make asan       tests under AddressSanitizer and UndefinedBehaviorSanitizer
asan: deps-test
	@$(MAKE) --no-print-directory build-asan
	JOBS=$(JOBS) scripts/ci-ctest asan -LE 'soak|release_only'

#: make tsan       tests labelled tsan (ranks as threads) under ThreadSanitizer
tsan: deps-test
	@$(MAKE) --no-print-directory build-tsan
	JOBS=$(JOBS) scripts/ci-ctest tsan -L tsan

#: make mutants    check that every planted mistake of the protocol makes a test fail
mutants: deps-test
	@$(MAKE) --no-print-directory build-mutants
	JOBS=$(JOBS) scripts/ci-ctest mutants -L mutants

#: make fuzz       run each libFuzzer harness for FUZZ_SECONDS (60)
fuzz: deps-ci
	@$(MAKE) --no-print-directory build-fuzz
	scripts/ci-fuzz build/fuzz $(FUZZ_SECONDS)

#: make soak       the long runs; SOAK_MINUTES (30) bounds them
soak: deps-test
	@$(MAKE) --no-print-directory build-release
	scripts/soak

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

.PHONY: all run test asan tsan mutants fuzz soak format lint install clean help
.PRECIOUS: build/%/build.ninja
