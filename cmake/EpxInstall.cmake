# libepx.so beside libepx.a, and what an installation holds: headers, both libraries, the CMake package and epx.pc.
# Included by lib/CMakeLists.txt. Everything is in the install component "libepx".
include(CMakePackageConfigHelpers)

add_library(epx_shared SHARED $<TARGET_OBJECTS:epx_objs> $<TARGET_OBJECTS:epx_base>)
set_target_properties(epx_shared PROPERTIES OUTPUT_NAME epx VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR})
target_link_libraries(epx_shared PRIVATE epx_options ${CMAKE_DL_LIBS})
if(NOT EPX_SANITIZE)
  target_link_options(epx_shared PRIVATE -Wl,--no-undefined)
endif()

install(TARGETS epx_static epx_shared COMPONENT libepx
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} NAMELINK_COMPONENT libepx)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/epx DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT libepx FILES_MATCHING PATTERN "*.h")

set(EPX_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/epx)
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/epxConfig.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/epxConfig.cmake
  INSTALL_DESTINATION ${EPX_CMAKE_DIR} PATH_VARS CMAKE_INSTALL_INCLUDEDIR CMAKE_INSTALL_LIBDIR)
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/epxConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/epxConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/epxConfigVersion.cmake
  DESTINATION ${EPX_CMAKE_DIR} COMPONENT libepx)

# epx.pc finds its prefix from its own place, so that an installation may be moved.
file(RELATIVE_PATH EPX_PC_TO_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" EPX_PC_TO_PREFIX "${EPX_PC_TO_PREFIX}")
configure_file(${PROJECT_SOURCE_DIR}/cmake/epx.pc.in ${CMAKE_CURRENT_BINARY_DIR}/epx.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/epx.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT libepx)

# A wrong include fails the build.
add_custom_target(check_layers ALL COMMAND sh ${PROJECT_SOURCE_DIR}/scripts/check-layers ${PROJECT_SOURCE_DIR} VERBATIM)
