if(TARGET epx_engine)
set(app_dir ${PROJECT_SOURCE_DIR}/app)
epx_add_test(NAME unit_options SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/options_test.c ${app_dir}/options.c ${app_dir}/options_help.c ${app_dir}/page.c
  ${app_dir}/settings.c ${app_dir}/settings_help.c ${app_dir}/validate.c LIBS epx_engine LABELS unit)
endif()
