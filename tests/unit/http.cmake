if(TARGET epx_server)
  epx_add_test(NAME unit_http_text_stream SOURCES ${CMAKE_CURRENT_LIST_DIR}/http_text_stream_test.c LIBS epx_server LABELS unit)
  epx_add_test(NAME unit_http_parse SOURCES ${CMAKE_CURRENT_LIST_DIR}/http_parse_test.c LIBS epx_server LABELS unit)
endif()
