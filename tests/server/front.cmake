# The front's processes: without a model (fake_rank.c instead of the engine), then with real ones.
set(front_dir ${CMAKE_CURRENT_SOURCE_DIR})
epx_add_test(NAME front_fake SOURCES ${front_dir}/front_fake_test.c ${front_dir}/front_util.c ${front_dir}/fake_rank.c
  $<TARGET_OBJECTS:epx_front> LIBS epx_static LABELS server TIMEOUT 120)
