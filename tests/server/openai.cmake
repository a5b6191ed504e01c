# The official client of OpenAI's API against the whole program. Skips without the package (scripts/install-deps ci installs it).
find_package(Python3 COMPONENTS Interpreter)
if(Python3_FOUND AND TARGET epx)
  add_test(NAME openai_client COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/openai_client_test.py $<TARGET_FILE:epx>
    ${PROJECT_SOURCE_DIR}/models/tinymoe-math ${PROJECT_SOURCE_DIR}/build/venv/bin/python)
  set_tests_properties(openai_client PROPERTIES TIMEOUT 300 SKIP_RETURN_CODE 77 LABELS server)
endif()
