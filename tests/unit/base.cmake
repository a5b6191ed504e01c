epx_add_test(NAME unit_base SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/base_test.c LIBS epx_static LABELS unit)
