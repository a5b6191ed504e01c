# `epx eval` from outside.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
add_test(NAME eval_cli COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/eval_test.py $<TARGET_FILE:epx> ${PROJECT_SOURCE_DIR} ${EPX_REFERENCE_DIR})
set_tests_properties(eval_cli PROPERTIES TIMEOUT 120 LABELS server)
