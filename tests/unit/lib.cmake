epx_add_test(NAME unit_lib_backends SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/lib_backends_test.c LIBS epx_static LABELS unit)
