if(TARGET epx_engine)
  epx_add_test(NAME unit_sched SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/sched_test.c LIBS epx_engine LABELS unit)
endif()
