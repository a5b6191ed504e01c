# What `epx bench serve` and `epx eval gsm8k` compute.
epx_add_test(NAME unit_bench_metrics SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/bench_metrics_test.c LIBS epx_client_math LABELS unit)
