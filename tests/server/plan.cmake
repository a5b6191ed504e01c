# `epx plan` against the counters and sizes that `epx bench a2a` measures.
if(NOT EPX_SANITIZE)
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
  add_test(NAME plan_against_bench COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/plan_test.py $<TARGET_FILE:epx>
    ${PROJECT_SOURCE_DIR}/bench/results/h200-x2/exchange.jsonl.xz)
  set_tests_properties(plan_against_bench PROPERTIES TIMEOUT 120 PROCESSORS 2 LABELS server)
endif()

# `epx bench ops`: its cases, formulas and refusals. The roofs take 1 GiB for a moment.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
add_test(NAME bench_ops COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/bench_ops_test.py $<TARGET_FILE:epx>)
set_tests_properties(bench_ops PROPERTIES TIMEOUT 120 PROCESSORS 2 LABELS server)
