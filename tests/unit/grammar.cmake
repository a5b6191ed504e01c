# Grammar-constrained decoding: texts by a C program, judged by Python.
if(NOT TARGET epx_engine)
  return() # the library alone is built
endif()
find_package(Python3 COMPONENTS Interpreter)
add_executable(grammar_gen ${CMAKE_CURRENT_LIST_DIR}/grammar_gen.c)
target_link_libraries(grammar_gen PRIVATE epx_engine epx_options)
if(Python3_FOUND)
  add_test(NAME unit_grammar COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/grammar_test.py $<TARGET_FILE:grammar_gen>
    ${PROJECT_SOURCE_DIR}/models/tinymoe-math/tokenizer.json
    ${PROJECT_SOURCE_DIR}/tests/data/tokenizers/qwen3/tokenizer.json.xz)
  set_tests_properties(unit_grammar PROPERTIES TIMEOUT 120 LABELS unit)
endif()
