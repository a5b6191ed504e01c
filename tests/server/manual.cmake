# --help, epx(1), completions and the systemd unit; parts that need another program skip without it (scripts/install-deps ci brings them).
find_package(Python3 REQUIRED COMPONENTS Interpreter)
if(TARGET epx AND NOT EPX_SANITIZE)
  foreach(part always groff mandoc zsh fish systemd)
    add_test(NAME manual_${part} COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/manual_test.py $<TARGET_FILE:epx> ${PROJECT_SOURCE_DIR}
      ${CMAKE_BINARY_DIR} ${part})
    set_tests_properties(manual_${part} PROPERTIES TIMEOUT 120 SKIP_RETURN_CODE 77 LABELS server)
  endforeach()
endif()
