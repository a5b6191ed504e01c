if(TARGET epx_engine)
  epx_add_test(NAME unit_kv SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/kv_test.c LIBS epx_engine LABELS unit)
endif()
