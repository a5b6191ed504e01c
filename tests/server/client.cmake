# `epx bench serve` and `epx eval gsm8k` against servers with known answers at known times; SGLang's own clients against `epx serve`.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
if(TARGET epx)
  add_test(NAME bench_serve COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/bench_serve_test.py $<TARGET_FILE:epx> ${PROJECT_SOURCE_DIR})
  set_tests_properties(bench_serve PROPERTIES TIMEOUT 180 LABELS server)
  add_test(NAME eval_gsm8k COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/gsm8k_test.py $<TARGET_FILE:epx> ${PROJECT_SOURCE_DIR})
  set_tests_properties(eval_gsm8k PROPERTIES TIMEOUT 180 LABELS server)
  # Skips without the packages (scripts/install-deps ci installs them).
  add_test(NAME sglang_clients COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/sglang_clients_test.py $<TARGET_FILE:epx>
    ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/build/venv/bin/python)
  set_tests_properties(sglang_clients PROPERTIES TIMEOUT 300 SKIP_RETURN_CODE 77 LABELS "server;release_only")
endif()
