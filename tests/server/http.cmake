# The HTTP server over a played cluster, driven from outside by Python's standard library; and the whole program end to end.
find_package(Python3 COMPONENTS Interpreter)
add_executable(http_fake_server ${CMAKE_CURRENT_LIST_DIR}/http_fake_server.c)
target_link_libraries(http_fake_server PRIVATE epx_server epx_options)
target_compile_definitions(http_fake_server PRIVATE EPX_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
if(Python3_FOUND)
  add_test(NAME http_server COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/http_test.py $<TARGET_FILE:http_fake_server>)
  set_tests_properties(http_server PROPERTIES TIMEOUT 120 SKIP_RETURN_CODE 77 LABELS server)
  if(TARGET epx)
    set(epx_program $<TARGET_FILE:epx>)
  else()
    set(epx_program none)
  endif()
  add_test(NAME http_e2e COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/http_e2e.py ${epx_program}
    ${PROJECT_SOURCE_DIR}/models/tinymoe-math)
  set_tests_properties(http_e2e PROPERTIES TIMEOUT 120 SKIP_RETURN_CODE 77 LABELS server)
  add_test(NAME native_api COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/native_test.py ${epx_program}
    ${PROJECT_SOURCE_DIR}/models/tinymoe-math ${PROJECT_SOURCE_DIR})
  set_tests_properties(native_api PROPERTIES TIMEOUT 120 SKIP_RETURN_CODE 77 LABELS "server;tsan")
  add_test(NAME layouts COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/layouts_test.py ${epx_program}
    ${PROJECT_SOURCE_DIR}/models/tinymoe-math)
  set_tests_properties(layouts PROPERTIES TIMEOUT 120 SKIP_RETURN_CODE 77 LABELS server)
  add_test(NAME nodes COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/nodes_test.py ${epx_program}
    ${PROJECT_SOURCE_DIR}/models/tinymoe-math ${PROJECT_BINARY_DIR}/lib)
  set_tests_properties(nodes PROPERTIES TIMEOUT 120 SKIP_RETURN_CODE 77 PROCESSORS 2 LABELS server)
  # Screenshots: build/artifacts.
  add_test(NAME web_page COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/web_test.py ${epx_program}
    ${PROJECT_SOURCE_DIR}/models/tinymoe-math ${PROJECT_SOURCE_DIR}/build/artifacts $<TARGET_FILE:http_fake_server>)
  set_tests_properties(web_page PROPERTIES TIMEOUT 300 SKIP_RETURN_CODE 77 LABELS "server;release_only")
endif()
# Many streams, slow clients, clients that leave: a short form here, a long one in `make soak`.
if(Python3_FOUND AND TARGET epx)
  foreach(form short long)
    add_test(NAME http_endure_${form} COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/endure_test.py $<TARGET_FILE:http_fake_server>
      $<TARGET_FILE:epx> ${PROJECT_SOURCE_DIR}/models/tinymoe-math ${form})
  endforeach()
  set_tests_properties(http_endure_short PROPERTIES TIMEOUT 180 LABELS "server;release_only")
  set_tests_properties(http_endure_long PROPERTIES TIMEOUT 1800 RUN_SERIAL TRUE LABELS soak)
endif()
