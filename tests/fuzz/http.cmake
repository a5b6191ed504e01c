epx_add_fuzz(NAME fuzz_http_json SOURCES ${CMAKE_CURRENT_LIST_DIR}/http_json_fuzz.c LIBS epx_server
  SEEDS ${CMAKE_CURRENT_LIST_DIR}/seeds/http_json)
