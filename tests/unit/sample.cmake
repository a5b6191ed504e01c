if(TARGET epx_engine)
  epx_add_test(NAME unit_sample SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/sample_test.c LIBS epx_engine LABELS unit)
endif()
